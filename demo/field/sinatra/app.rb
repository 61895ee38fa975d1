# Notes in Sinatra: settings are read once at the start, and written by a form. Sessions are in signed cookies.
require 'json'
require 'sinatra/base'

class Notes < Sinatra::Base
  enable :sessions
  set :session_secret, File.read('secret-key')
  set :title_file, 'settings.json'
  OWN = JSON.parse(File.read(title_file))
  NOTES = JSON.parse(File.read('notes.json'))

  get '/' do
    "<h1>#{OWN['title']}</h1>" + NOTES.map { |text| "<p>#{text}" }.join
  end

  post '/login' do
    session[:name] = params[:name]
    'logged in'
  end

  get '/me' do
    "logged in as #{session[:name] || 'nobody'}"
  end

  post '/settings' do
    OWN['title'] = params[:title]
    File.write(settings.title_file, JSON.generate(OWN))
    'changed'
  end
end
